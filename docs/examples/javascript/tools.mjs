// Let the model call a function of yours, and answer with what it returned.
import { call } from "./tollgate.mjs";

const tools = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "Weather of a city",
      parameters: {
        type: "object",
        properties: { city: { type: "string" } },
        required: ["city"],
      },
    },
  },
];
const model = "pocket-chat";
const messages = [{ role: "user", content: "What is the weather in Paris?" }];
const chat = (more) => call("POST", "/v1/chat/completions", { model, messages, tools, ...more });

const asked = (await chat({ tool_choice: "required" })).choices[0].message;
const wanted = asked.tool_calls[0];
const { city } = JSON.parse(wanted.function.arguments);
console.log(`the model calls ${wanted.function.name}(${city})`);

messages.push(asked, { role: "tool", tool_call_id: wanted.id, content: `sunny in ${city}` });
console.log((await chat()).choices[0].message.content);
