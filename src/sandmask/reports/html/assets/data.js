// The data of the page: deflated, in base64, decoded on demand.

let data = null; // the report, which is loaded before anything is drawn
let runsPromise = null;
const chunkPromises = new Map();

function bytesOf(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let place = 0; place < binary.length; place++) bytes[place] = binary.charCodeAt(place);
  return bytes;
}

async function inflate(name) {
  const packed = bytesOf(document.getElementById(`data-${name}`).textContent);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

const inflateJson = async (name) => JSON.parse(new TextDecoder().decode(await inflate(name)));

async function loadReport() {
  data = await inflateJson("report");
  data.selections = Object.fromEntries(data.report.selections.map((entry) => [entry.selection, entry]));
}

// Load all runs without their curves: columns, the place of each id, and helpers.
function loadRuns() {
  runsPromise ??= inflateJson("runs").then((store) => {
    const { columns } = store;
    return {
      ...columns,
      count: columns.id.length,
      offers: store.offers,
      place: new Map(columns.id.map((id, place) => [id, place])),
      hparamsOf: (place) => store.hparams[columns.hparams[place]],
      settingsOf: (place) => store.settings[columns.settings[place]],
    };
  });
  return runsPromise;
}

async function chunk(number) {
  const buffer = await inflate(`curves-${number}`);
  const length = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  const count = (buffer.byteLength - 4 - length) / 2;
  return {
    header,
    lower: new Uint8Array(buffer, 4 + length, count),
    upper: new Uint8Array(buffer, 4 + length + count, count),
  };
}

// Load the steps of a run, and its curves by name. Missing values are null.
async function loadCurves(place) {
  const number = Math.floor(place / data.runsPerChunk);
  if (!chunkPromises.has(number)) chunkPromises.set(number, chunk(number));
  const { header, lower, upper } = await chunkPromises.get(number);
  const within = place % data.runsPerChunk;
  let offset = 0;
  for (let before = 0; before < within; before++) offset += header[before].steps.length * header[before].curves.length;
  const { steps, curves } = header[within];
  const decoded = new Map();
  for (const [name, low, high, levels, isLog] of curves) {
    const values = [];
    for (let point = 0, code = 0; point < steps.length; point++, offset++) {
      const folded = lower[offset] | (upper[offset] << 8);
      code = (code + ((folded >> 1) ^ -(folded & 1))) & 0xffff;
      const share = code / levels;
      if (code === 0xffff) values.push(null);
      else values.push(isLog ? low * Math.pow(high / low, share) : low + share * (high - low));
    }
    decoded.set(name, values);
  }
  return { steps, curves: decoded };
}
