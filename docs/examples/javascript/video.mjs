// Generate a video from a text.
import { run, save } from "./tollgate.mjs";

const prompt = "a red star moves left above a blue square";
await save(await run("pocket-video", { prompt, seconds: 2 }), "video.mp4");
