// Generate a picture, edit it, and save both.
import { readFile, writeFile } from "node:fs/promises";
import { URL_, call } from "./tollgate.mjs";

const drawn = await call("POST", "/v1/images/generations", {
  model: "pocket-image",
  prompt: "a red circle above a blue square",
  scale: 4, // 64x64, drawn four times as large
});
await writeFile("picture.png", Buffer.from(drawn.data[0].b64_json, "base64"));
console.log(`saved picture.png for $${drawn.usage.cost}`);

const form = new FormData();
form.set("model", "pocket-image");
form.set("prompt", "make the circle yellow");
form.set("image", new Blob([await readFile("picture.png")], { type: "image/png" }), "picture.png");
const answer = await fetch(`${URL_}/v1/images/edits`, {
  method: "POST",
  headers: { Authorization: `Bearer ${process.env.TOLLGATE_API_KEY}` },
  body: form,
});
const edited = await answer.json();
if (!answer.ok) throw new Error(edited.error.message);
await writeFile("edited.png", Buffer.from(edited.data[0].b64_json, "base64"));
console.log(`saved edited.png for $${edited.usage.cost}`);
