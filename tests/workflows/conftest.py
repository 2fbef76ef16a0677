"""Workflows over models without weights."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.artist import Artist, at_work
from tests.databases import Databases
from tests.stack import Stack

SAYING = ["say-yes", "say-no", "say-2", "broken"]
MODELS = ["draw", "sketch", "enlarge", "write", "blend", "film", "speak", "talk", *SAYING]
CATALOG = """\
version: 1
models:
  - name: draw
    task: text-to-image
    also: [image-to-image]
    engine: echo
    sizes: ["64x64", "128x64"]
    limits: {images: 4, sources: 3, steps: 10}
    price:
      - {unit: image, amount: "0.01"}
      - {unit: image, amount: "0.02", when: {size: 128x64}}
  - name: sketch
    task: text-to-image
    engine: echo
    vocabulary: {words: [red, circle]}
    examples: [{prompt: "a red circle"}]
    price: [{unit: image, amount: "0.01"}]
  - name: enlarge
    task: image-upscale
    engine: echo
    limits: {images: 1, sources: 1, scale: 4}
    price: [{unit: image, amount: "0.0005"}]
  - name: blend
    task: image-blend
    engine: echo
    limits: {images: 1, sources: 4}
    price: [{unit: image, amount: "0.005"}]
  - name: film
    task: image-to-video
    engine: echo
    limits: {seconds: 4}
    default_parameters: {seconds: 2}
    price: [{unit: video_second, amount: "0.1"}]
  - name: speak
    task: text-to-speech
    engine: echo
    limits: {characters: 500}
    price: [{unit: character, amount: "0.0001"}]
  - name: talk
    task: talking-head
    engine: echo
    limits: {seconds: 10}
    price: [{unit: video_second, amount: "0.01"}]
  - name: write
    task: text-generation
    engine: echo
    limits: {context_tokens: 4096, output_tokens: 100}
    price:
      - {unit: input_token, amount: "1", per: 1000000}
      - {unit: output_token, amount: "3", per: 1000000}

  - name: say-yes
    task: text-generation
    engine: echo
    limits: &limits {context_tokens: 32768, output_tokens: 100}
    price: &price
      - {unit: input_token, amount: "1", per: 1000000}
      - {unit: output_token, amount: "3", per: 1000000}
  - {name: say-no, task: text-generation, engine: echo, limits: *limits, price: *price}
  - {name: say-2, task: text-generation, engine: echo, limits: *limits, price: *price}
  - {name: broken, task: text-generation, engine: echo, limits: *limits, price: *price}
  - name: best-answer
    task: text-generation
    price: steps
    workflow:
      inputs: {prompt: {type: text}}
      steps:
        - name: answer
          model: say-yes
          input: &asked {messages: [{role: user, content: "${inputs.prompt}"}], max_tokens: 20}
          best_of: {n: 2, models: [say-yes, say-no], judge: say-2, criterion: the shorter one}
      output: ${steps.answer}
  - name: voted-answer
    task: text-generation
    price: steps
    workflow:
      inputs: {prompt: {type: text}}
      steps:
        - name: opinion
          model: write
          input: *asked
          vote: {n: 3, models: [say-yes, say-no, say-no]}
        - name: tell
          model: write
          input: {messages: [{role: user, content: "They said: ${steps.opinion}"}], max_tokens: 20}
      output: ${steps.tell}
  - name: hardy-answer
    task: text-generation
    price: steps
    workflow:
      inputs: {prompt: {type: text}}
      steps:
        - name: answer
          model: broken
          input: *asked
          best_of: {n: 2, models: [broken, say-yes], judge: say-2}
      output: ${steps.answer}
  - name: draw-then-enlarge
    aliases: [acme/big]
    task: text-to-image
    price: steps
    workflow:
      inputs:
        prompt: {type: text}
        style: {type: text, default: plain}
      steps:
        - name: draw
          model: draw
          input: {prompt: "${inputs.prompt}, ${inputs.style}", size: 64x64, seed: 5}
          retries: 1
          backoff_s: 0.1
        - name: enlarge
          model: enlarge
          input: {image: "${steps.draw.image}", scale: 2}
      output: ${steps.enlarge}
  - name: expand-then-draw
    task: text-to-image
    limits: {timeout_s: 30}
    price: [{unit: request, amount: "0.05"}]
    workflow:
      inputs: {prompt: {type: text}}
      steps:
        - name: expand
          model: write
          input:
            messages: [{role: user, content: "Describe: ${inputs.prompt}"}]
            max_tokens: 60
          characters: 200
        - {name: draw, model: draw, input: {prompt: "${steps.expand.text}"}}
      output: ${steps.draw.image}
  - name: write-then-sketch
    task: text-to-image
    price: steps
    workflow:
      inputs: {prompt: {type: text}, not: {type: text, default: circle}}
      steps:
        - name: write
          model: write
          input: {messages: [{role: user, content: "${inputs.prompt}"}], max_tokens: 60}
          characters: 200
        - name: sketch
          model: sketch
          input: {prompt: "${steps.write}", negative_prompt: "${inputs.not}"}
      output: ${steps.sketch}
  - name: both-then-blend
    task: image-blend
    price: steps
    workflow:
      inputs: {one: {type: text}, other: {type: text}, extra: {type: image, optional: true}}
      steps:
        - {name: first, model: draw, input: {prompt: "${inputs.one}"}}
        - {name: second, model: draw, input: {prompt: "${inputs.other}", size: 128x64}}
        - name: blended
          model: blend
          input:
            prompt: both
            images: ["${steps.first}", "${steps.second.image}", "${inputs.extra}"]
      output: ${steps.blended}
  - name: maybe-redraw
    task: image-upscale
    price: steps
    workflow:
      inputs: {image: {type: image}, change: {type: text, optional: true}}
      steps:
        - name: redraw
          model: draw
          when: inputs.change
          input: {prompt: "${inputs.change}", image: "${inputs.image}"}
        - {name: enlarge, model: enlarge, input: {image: "${steps.redraw | inputs.image}"}}
      output: ${steps.enlarge}
  - name: person
    task: talking-head
    price: steps
    workflow:
      inputs:
        image: {type: image}
        text: {type: text, optional: true}
        audio: {type: audio, optional: true}
      steps:
        - name: speak
          model: speak
          when: inputs.text
          input: {text: "${inputs.text}", format: wav}
          retries: 1
          backoff_s: 0.1
        - name: show
          model: talk
          input: {image: "${inputs.image}", audio: "${steps.speak.audio | inputs.audio}"}
      output: ${steps.show}
  - name: short
    task: text-to-image
    limits: {timeout_s: 2}
    price: steps
    workflow:
      inputs: {prompt: {type: text}}
      steps:
        - {name: draw, model: draw, input: {prompt: "${inputs.prompt}"}}
        - {name: enlarge, model: enlarge, input: {image: "${steps.draw}"}}
      output: ${steps.enlarge}
"""


def make_stack(directory: Path, url: str, redis_url: str) -> Stack:
    directory.mkdir()
    catalog = directory / "catalog.yaml"
    catalog.write_text(CATALOG)
    return Stack(directory, url, redis_url, f"t{uuid.uuid4().hex[:8]}", catalog)


@pytest.fixture(scope="session")
def shared_stack(
    tmp_path_factory: pytest.TempPathFactory, postgres: str, valkey: str
) -> Iterator[tuple[Stack, Artist]]:
    directory = tmp_path_factory.mktemp("workflows")
    url = Databases("sqlite", directory, postgres).make()
    made = make_stack(directory / "home", url, valkey)
    with at_work(MODELS, valkey, made.namespace, made.environment()["BLOB_URL"]) as artist:
        try:
            made.start_gateway()
            made.wait_for_model("draw-then-enlarge")
            yield made, artist
        finally:
            made.stop()


@pytest.fixture
def stack(shared_stack: tuple[Stack, Artist]) -> Iterator[Stack]:
    yield shared_stack[0]
    shared_stack[0].close_clients()


@pytest.fixture
def artist(shared_stack: tuple[Stack, Artist]) -> Artist:
    return shared_stack[1]
