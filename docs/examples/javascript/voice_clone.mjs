// Speak a text in the voice of a recording. Clone a voice only with its owner's consent.
import { dataUri, run, save } from "./tollgate.mjs";

const path = new URL("../../audio/pocket-speech.mp3", import.meta.url); // or a recording of yours
const speech = await run("pocket-speech", {
  text: "The receipt says what this cost.",
  recording: await dataUri(path, "audio/mpeg"),
  format: "wav",
});
await save(speech, "cloned.wav");
