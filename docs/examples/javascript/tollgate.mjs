// What the examples share: calls of the API, waiting for a request, saving its files.
// TOLLGATE_URL and TOLLGATE_API_KEY say where the gateway is, and who pays. Node 18 or newer.
import { readFile, writeFile } from "node:fs/promises";

export const URL_ = process.env.TOLLGATE_URL ?? "http://127.0.0.1:8000";

// Call the API, and throw in the gateway's own words if it refuses.
export async function call(method, path, body, key = process.env.TOLLGATE_API_KEY) {
  const answer = await fetch(URL_ + path, {
    method,
    headers: { Authorization: `Bearer ${key}`, "Content-Type": "application/json" },
    body: body && JSON.stringify(body),
  });
  const value = await answer.json();
  if (!answer.ok) throw Object.assign(new Error(value.error.message), { status: answer.status });
  return value;
}

// Order a request, wait until it has ended, and return it with its output.
export async function run(model, input) {
  let request = await call("POST", "/v1/requests", { model, input });
  while (["queued", "running"].includes(request.status)) {
    await new Promise((done) => setTimeout(done, 200));
    request = await call("GET", `/v1/requests/${request.id}`);
  }
  if (request.status !== "succeeded") throw new Error(request.error.message);
  console.log(`${model}: $${request.cost}, receipt at /v1/requests/${request.id}/receipt`);
  return request;
}

// Download the first file of a request's output.
export async function save(request, name) {
  const medium = request.output.media.find((one) => one.role === "output");
  const answer = await fetch(medium.url);
  await writeFile(name, Buffer.from(await answer.arrayBuffer()));
  console.log(`saved ${name}`);
}

export async function dataUri(path, contentType) {
  return `data:${contentType};base64,${(await readFile(path)).toString("base64")}`;
}
