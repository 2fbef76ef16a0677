// Draws how sounds look: the waveform of audio, and the notes of a score in MIDI.

const NOTE_ON = 0x90;
const LARGEST = 30_000_000;

export const drawing = { audio: drawWave, score: drawNotes };

/** Draw a file on a canvas, which is removed if that cannot be done: the file plays all the same. */
export async function draw(canvas, kind, path) {
  try {
    canvas.setAttribute("aria-label", await drawing[kind](canvas, await read(path)));
  } catch {
    canvas.remove();
  }
}

async function read(path) {
  const answer = await fetch(path);
  if (answer.ok && Number(answer.headers.get("Content-Length")) <= LARGEST) return answer.arrayBuffer();
  answer.body?.cancel();
  throw new RangeError(path);
}

function colours(canvas) {
  const style = getComputedStyle(canvas);
  return { ink: style.color, line: style.borderTopColor };
}

async function drawWave(canvas, data) {
  const sound = await new OfflineAudioContext(1, 1, 44100).decodeAudioData(data);
  const samples = sound.getChannelData(0);
  const pen = canvas.getContext("2d");
  pen.fillStyle = colours(canvas).ink;
  const step = samples.length / canvas.width;
  for (let x = 0; x < canvas.width; x += 1) {
    let least = 0;
    let most = 0;
    for (let at = Math.floor(x * step); at < (x + 1) * step; at += 1) {
      least = Math.min(least, samples[at]);
      most = Math.max(most, samples[at]);
    }
    const middle = canvas.height / 2;
    pen.fillRect(x, middle - most * middle, 1, Math.max(1, (most - least) * middle));
  }
  return `Waveform, ${sound.duration.toFixed(1)} s`;
}

/** Yield the notes of a MIDI file: when they begin and end, in ticks, how high, and their track. */
function* notes(view) {
  let at = 8 + view.getUint32(4);
  for (let track = 0; at < view.byteLength; track += 1) {
    const end = at + 8 + view.getUint32(at + 4);
    const open = new Map();
    let time = 0;
    let status = 0;
    at += 8;
    const number = () => {
      let value = 0;
      for (;;) {
        const byte = view.getUint8(at++);
        value = value * 128 + (byte & 127);
        if (byte < 128) return value;
      }
    };
    const skip = () => {
      const length = number();
      at += length;
    };
    while (at < end) {
      time += number();
      if (view.getUint8(at) >= 128) status = view.getUint8(at++);
      if (status === 0xff) {
        at += 1;
        skip();
      } else if (status >= 0xf0) {
        skip();
      } else {
        const high = view.getUint8(at);
        const kind = status & 0xf0;
        const loud = kind === 0xc0 || kind === 0xd0 ? 0 : view.getUint8(at + 1);
        at += kind === 0xc0 || kind === 0xd0 ? 1 : 2;
        const key = `${status & 15} ${high}`;
        if (kind === NOTE_ON && loud) open.set(key, time);
        else if ((kind === NOTE_ON || kind === 0x80) && open.has(key)) {
          yield { begins: open.get(key), ends: time, high, track };
          open.delete(key);
        }
      }
    }
    at = end;
  }
}

function drawNotes(canvas, data) {
  const found = [...notes(new DataView(data))];
  if (!found.length) throw new RangeError("no notes");
  const pen = canvas.getContext("2d");
  const { ink, line } = colours(canvas);
  const last = Math.max(...found.map((each) => each.ends));
  const low = Math.min(...found.map((each) => each.high));
  const tall = canvas.height / (Math.max(...found.map((each) => each.high)) - low + 1);
  const tracks = new Set(found.map((each) => each.track)).size;
  pen.fillStyle = line;
  for (let octave = Math.ceil(low / 12) * 12; octave * tall < canvas.height + low * tall; octave += 12) {
    pen.fillRect(0, canvas.height - (octave - low) * tall, canvas.width, 1);
  }
  pen.fillStyle = ink;
  for (const { begins, ends, high, track } of found) {
    pen.globalAlpha = 1 - (0.6 * track) / Math.max(1, tracks);
    const from = (begins / last) * canvas.width;
    pen.fillRect(from, canvas.height - (high - low + 1) * tall, Math.max(1, ((ends - begins) / last) * canvas.width - 1), Math.max(1, tall - 0.5));
  }
  return `${found.length} notes`;
}
