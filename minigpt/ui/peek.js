// Looks at a file of any size whose weights stay on the visitor's disk: only the header of a safetensors file, or the directory and the index of a
// zip, are read and sent; the server judges these bytes as it does whole files. Inside js_on_load gradio provides: element, props, trigger.
const LARGEST_UPLOAD = 64 * 2 ** 20, MOST = 16 * 2 ** 20;

const bytes = async (file, start, end) => new DataView(await file.slice(start, Math.min(end, start + MOST)).arrayBuffer());
const text = blob => new Promise(done => { const reader = new FileReader(); reader.onload = () => done(reader.result.split(',')[1] ?? ''); reader.readAsDataURL(blob); });

async function ranges(file) {  // which bytes tell what is in the file
  const head = await bytes(file, 0, 512), first = head.byteLength > 8 ? head.getUint32(0, true) : 0;
  if (first === 0x04034b50) return zipRanges(file);
  if (head.byteLength > 8 && [0x7b, 0x5b].includes(head.getUint8(8)) && head.getUint32(4, true) === 0) return [[0, 8 + Math.min(first, MOST)]];
  return [[0, (first & 255) === 0x80 ? 2 : 512]];  // a pickle without a zip, or something else that its first bytes tell
}

async function zipRanges(file) {
  const last = Math.max(0, file.size - 98), tail = await bytes(file, last, file.size), found = [[0, 4], [last, file.size]];
  let [size, start] = [tail.getUint32(88, true), tail.getUint32(92, true)];
  if (tail.getUint32(56, true) === 0x07064b50) [size, start] = [Number(tail.getBigUint64(40, true)), Number(tail.getBigUint64(48, true))];  // zip64
  const directory = await bytes(file, start, start + size);
  found.push([start, start + size]);
  for (let at = 0; at + 46 <= directory.byteLength;) {
    const [name, extra, comment] = [28, 30, 32].map(place => directory.getUint16(at + place, true)), where = directory.getUint32(at + 42, true);
    if (/(^|\/)(data\.pkl|byteorder)$/.test(new TextDecoder().decode(new Uint8Array(directory.buffer, at + 46, name)))) {
      const local = await bytes(file, where, where + 30);
      found.push([where, where + 30 + local.getUint16(26, true) + local.getUint16(28, true) + directory.getUint32(at + 20, true)]);
    }
    at += 46 + name + extra + comment;
  }
  return found;
}

async function look(file) {
  const wanted = await ranges(file).catch(() => [[0, 4]]);  // damaged: the server says how
  const parts = await Promise.all(wanted.map(async ([start, end]) => [start, await text(file.slice(start, Math.min(end, start + MOST)))]));
  props.value = JSON.stringify({ name: file.name, size: file.size, parts });
  trigger('submit');
}

for (const kind of ['change', 'drop']) document.addEventListener(kind, event => {  // before gradio, which would refuse a large file
  const file = (event.target.files ?? event.dataTransfer?.files)?.[0], any = event.target.id === 'any-file';
  if (!file || !(any || (event.target.closest('#upload') && file.size > LARGEST_UPLOAD))) return;
  event.stopImmediatePropagation(); event.preventDefault(); look(file);
}, true);
