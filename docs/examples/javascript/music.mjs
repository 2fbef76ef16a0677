// Compose a short piece, as sound.
import { run, save } from "./tollgate.mjs";

const prompt = "a calm waltz in D major at 90 bpm with piano";
await save(await run("pocket-music", { prompt, seconds: 5 }), "waltz.mp3");
