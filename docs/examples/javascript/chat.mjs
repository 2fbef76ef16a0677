// Chat: one answer with its price, then a streamed one. OpenAI's client works as well:
// new OpenAI({ baseURL: "http://127.0.0.1:8000/v1", apiKey }).
import { URL_, call } from "./tollgate.mjs";

const ask = (content) => ({ model: "pocket-chat", messages: [{ role: "user", content }] });

const answer = await call("POST", "/v1/chat/completions", ask("What is a hold?"));
console.log(answer.choices[0].message.content);
console.log(`$${answer.usage.cost.toFixed(9)} for request ${answer.id}`);

const stream = await fetch(`${URL_}/v1/chat/completions`, {
  method: "POST",
  headers: {
    Authorization: `Bearer ${process.env.TOLLGATE_API_KEY}`,
    "Content-Type": "application/json",
  },
  body: JSON.stringify({ ...ask("What is 12 plus 30?"), stream: true }),
});
let rest = "";
for await (const part of stream.body.pipeThrough(new TextDecoderStream())) {
  const events = (rest + part).split("\n\n");
  rest = events.pop();
  for (const event of events) {
    const data = event.replace(/^data: /, "");
    if (data === "[DONE]") continue;
    process.stdout.write(JSON.parse(data).choices[0]?.delta.content ?? "");
  }
}
console.log();
