// Give a program a key that can spend a tenth of a cent, ask prices first, and stop at its end.
// Needs TOLLGATE_ADMIN_KEY as well, because it creates the key.
import { call } from "./tollgate.mjs";

const account = process.env.TOLLGATE_ACCOUNT ?? "default";
const order = { model: "pocket-image", prompt: "a green star" };

const limits = { name: "guarded", spend_limit: "0.001" };
const admin = process.env.TOLLGATE_ADMIN_KEY;
const { secret } = await call("POST", `/v1/admin/accounts/${account}/keys`, limits, admin);

const input = { prompt: order.prompt };
const quote = await call("POST", "/v1/quote", { model: order.model, input }, secret);
console.log(`a picture costs at most $${quote.max_cost}`);

for (let pictures = 0; ; pictures++) {
  try {
    await call("POST", "/v1/images/generations", order, secret);
  } catch (error) {
    if (error.status !== 402) throw error;
    console.log(`stopped after ${pictures} pictures: ${error.message}`);
    break;
  }
}
