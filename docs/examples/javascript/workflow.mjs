// Run two models in one order: a text is spoken, and a portrait moves its mouth to it.
import { call, dataUri, run, save } from "./tollgate.mjs";

const film = await run("pocket-talking-head", {
  image: await dataUri(new URL("../../img/portrait.png", import.meta.url), "image/png"),
  text: "Good morning.",
  voice: "ada",
});
await save(film, "talking.mp4");
const receipt = await call("GET", `/v1/requests/${film.id}/receipt`);
for (const step of receipt.steps) console.log(`  ${step.name} by ${step.model}: $${step.cost}`);
