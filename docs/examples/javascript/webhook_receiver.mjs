// Be called when a request ends, and check that the call is the gateway's (Standard Webhooks).
// Gateways call public HTTPS URLs only. To receive on your own machine, start yours with
// TOLLGATE_WEBHOOK_PRIVATE_ADDRESSES=true.
import { createHmac, timingSafeEqual } from "node:crypto";
import { createServer } from "node:http";
import { text } from "node:stream/consumers";
import { call } from "./tollgate.mjs";

const { secret } = await call("GET", "/v1/webhook-secret");
const key = Buffer.from(secret.replace(/^whsec_/, ""), "base64");

function isGenuine(headers, body) {
  const stamp = headers["webhook-timestamp"];
  if (Math.abs(Date.now() / 1000 - Number(stamp)) > 300) return false;
  const signed = `${headers["webhook-id"]}.${stamp}.${body}`;
  const expected = createHmac("sha256", key).update(signed).digest();
  return headers["webhook-signature"].split(" ").some((one) => {
    const given = Buffer.from(one.replace(/^v1,/, ""), "base64");
    return given.length === expected.length && timingSafeEqual(given, expected);
  });
}

const server = createServer(async (request, answer) => {
  const body = await text(request);
  const genuine = isGenuine(request.headers, body);
  answer.writeHead(genuine ? 204 : 401).end();
  if (!genuine) return;
  console.log(`${JSON.parse(body).type} of ${request.headers["webhook-id"]}`);
  server.close(); // a receiver of yours would go on
});
await new Promise((listening) => server.listen(0, "127.0.0.1", listening));

await call("POST", "/v1/requests", {
  model: "pocket-chat",
  input: { messages: [{ role: "user", content: "What is a receipt?" }] },
  webhook: `http://127.0.0.1:${server.address().port}/`,
});
