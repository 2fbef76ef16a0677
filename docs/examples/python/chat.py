"""Chat through OpenAI's client: one answer with its price, then a streamed one."""

import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("TOLLGATE_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ["TOLLGATE_API_KEY"],
)

# The shipped catalog answers at names such as gpt-4o-mini, too.
answer = client.chat.completions.create(
    model="pocket-chat",
    messages=[{"role": "user", "content": "What is a hold?"}],
)
print(answer.choices[0].message.content)
print(f"${answer.usage.cost:.9f} for request {answer.id}")

stream = client.chat.completions.create(
    model="pocket-chat",
    messages=[{"role": "user", "content": "What is 12 plus 30?"}],
    stream=True,
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
