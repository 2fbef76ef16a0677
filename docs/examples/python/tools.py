"""Let the model call a function of yours, and answer with what it returned."""

import json
import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("TOLLGATE_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ["TOLLGATE_API_KEY"],
)
tools = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]
messages = [{"role": "user", "content": "What is the weather in Paris?"}]
asked = client.chat.completions.create(
    model="pocket-chat", messages=messages, tools=tools, tool_choice="required"
)
call = asked.choices[0].message.tool_calls[0]
arguments = json.loads(call.function.arguments)
print(f"the model calls {call.function.name}({arguments})")

weather = f"sunny in {arguments['city']}"  # your function
messages += [
    asked.choices[0].message,
    {"role": "tool", "tool_call_id": call.id, "content": weather},
]
answer = client.chat.completions.create(model="pocket-chat", messages=messages, tools=tools)
print(answer.choices[0].message.content)
