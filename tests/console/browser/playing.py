"""A gateway and a worker with a model for every task, and an account with credit."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gateway.accounts.accounts import change_account, create_account
from gateway.ledger.transfers import add_credit
from gateway.pricing import NANOS_PER_USD
from gateway.sql.database import Database
from tests.console.browser.conftest import Site
from tests.console.seeding import Seeded
from tests.databases import Databases
from tests.gateway.test_pictures import LOCAL, SOLD, Service
from tests.stack import running
from tests.workers.diffusion.checkpoints import make_checkpoint, make_control_network
from tests.workers.llm.pictures import make_pictured
from tests.workers.reranking.checkpoints import make_checkpoint as make_ranker
from tests.workers.transcription.checkpoints import make_checkpoint as make_scribe

POCKET = Path(__file__).parents[3] / "workers" / "pocket"
IMAGE = """\
  - name: pocket-image
    task: text-to-image
    also: [image-to-image, image-edit, image-relight, image-restyle, image-blend]
    engine: diffusion
    checkpoint: POCKET/image
    options: {slots: 1}
    sizes: ["64x64"]
    limits: {images: 2, sources: 2, steps: 4, guidance: 10, characters: 500}
    default_parameters: {steps: 1, guidance: 1}
    price: [{unit: image, amount: "0.0004"}]
    vocabulary: {words: [a, red, circle, dark, outlined]}
    examples: [{prompt: a red circle}]
"""
SECOND = IMAGE.replace("pocket-image", "second-image")
SPEECH = """\
  - name: pocket-speech
    task: text-to-speech
    also: [voice-clone]
    engine: speech
    checkpoint: POCKET/speech
    options: {languages: [en], slots: 2, voices: {ada: {embedding: voices/ada.safetensors}}}
    limits: {characters: 500, seconds: 60}
    price: [{unit: character, amount: "0.001", per: 1000}]
"""
MORE = """\
  - name: pocket-music
    task: text-to-music
    engine: music
    checkpoint: POCKET/music
    limits: {seconds: 10, characters: 200}
    price: [{unit: audio_second, amount: "0.0002"}]
  - name: pocket-video
    task: text-to-video
    also: [image-to-video]
    engine: diffusion
    checkpoint: POCKET/video
    sizes: ["64x64"]
    limits: {seconds: 2, fps: 8, steps: 4, guidance: 10}
    default_parameters: {seconds: 1, fps: 8, steps: 2, guidance: 1}
    price: [{unit: video_second, amount: "0.001"}]
  - name: pocket-talking
    task: talking-head
    engine: talking
    checkpoint: POCKET/talking
    limits: {seconds: 5, fps: 30}
    price: [{unit: video_second, amount: "0.001"}]
  - name: head
    task: talking-head
    price: steps
    workflow:
      inputs: {image: {type: image}, text: {type: text}}
      steps:
        - {name: speak, model: pocket-speech, input: {text: "${inputs.text}", format: wav}}
        - model: pocket-talking
          name: show
          input: {image: "${inputs.image}", audio: "${steps.speak}"}
      output: ${steps.show}
"""
CHAT = """\
  - name: pocket-chat
    task: text-generation
    engine: llm
    checkpoint: POCKET/chat
    options: {dtype: float32, slots: 2}
    limits: {context_tokens: 256, output_tokens: 64, choices: 2}
    price:
      - {unit: input_token, amount: "0.02", per: 1000000}
      - {unit: output_token, amount: "0.08", per: 1000000}
"""
NOVEL = """\
  - name: novel
    task: text-generation
    engine: echo
    options: {tokens_per_step: 40, step_us: 20000}
    limits: {context_tokens: 40000, output_tokens: 12000}
    price:
      - {unit: input_token, amount: "0.02", per: 1000000}
      - {unit: output_token, amount: "0.08", per: 1000000}
"""


OTHERS = """\
  - name: pocket-upscale
    task: image-upscale
    engine: upscale
    checkpoint: POCKET/upscale
    limits: {images: 1, sources: 1, scale: 4}
    price: [{unit: image, amount: "0.0005"}]
  - name: pocket-video-upscale
    task: video-upscale
    engine: upscale
    checkpoint: POCKET/upscale
    limits: {seconds: 3, sources: 1, scale: 4}
    price: [{unit: video_second, amount: "0.002"}]
  - name: painter
    task: text-to-image
    engine: diffusion
    checkpoint: PAINTER
    options: {controls: {edges: {checkpoint: CONTROL, strength: 0.5}}}
    sizes: ["32x32"]
    limits: {images: 1, steps: 4, guidance: 10, characters: 100}
    default_parameters: {steps: 2, guidance: 1}
    price:
      - {unit: image, amount: "0.0004"}
      - {unit: image, amount: "0.0006", when: {control: edges}}
  - name: pocket-embed
    task: text-embedding
    engine: embedding
    checkpoint: POCKET/chat
    options: {pooling: mean}
    limits: {context_tokens: 256, inputs: 8, dimensions: 192}
    price: [{unit: input_token, amount: "0.01", per: 1000000}]
  - name: ranker
    task: rerank
    engine: rerank
    checkpoint: RANKER
    limits: {context_tokens: 64, inputs: 10}
    price: [{unit: input_token, amount: "0.01", per: 1000000}]
  - name: scribe
    task: speech-to-text
    engine: transcription
    checkpoint: SCRIBE
    options: {threads: 1}
    limits: {seconds: 20}
    price: [{unit: audio_second, amount: "0.0001"}]
"""
MODELS = IMAGE + SECOND + SPEECH + MORE + CHAT + NOVEL + OTHERS


@contextmanager
def served(directory: Path, postgres: str, valkey: str, looking: Service) -> Iterator[Site]:
    """Serve the playground with every model above."""
    url = Databases("sqlite", directory, postgres).make()
    database = Database(url)
    with database.transaction() as connection:
        atlas = create_account(connection, "atlas")
        add_credit(
            connection,
            atlas.id,
            NANOS_PER_USD,
            kind="topup",
            key="one",
            actor="test",
            reason="test",
        )
    database.dispose()
    painter = make_checkpoint("StableDiffusionPipeline", directory / "painter")
    places = {
        "POCKET": POCKET,
        "PAINTER": painter,
        "CONTROL": make_control_network("StableDiffusionPipeline", painter, directory / "control"),
        "RANKER": make_ranker(directory / "ranker"),
        "SCRIBE": make_scribe(directory / "scribe", seed=7),
    }
    models = MODELS
    for name, place in places.items():
        models = models.replace(name, str(place))
    models += SOLD.format(url=looking.url)
    models += LOCAL.format(checkpoint=make_pictured("qwen2vl", directory / "local"))
    with running(
        directory / "home",
        url,
        valkey,
        namespace=f"t{uuid.uuid4().hex[:8]}",
        more_models=models,
        patience_s=120,
    ) as stack:
        yield Site(stack.url, url, Seeded({"atlas": atlas}, {}, {}))


@contextmanager
def somebody_elses_model() -> Iterator[Service]:
    with Service() as service:
        thread = threading.Thread(target=service.serve_forever)
        thread.start()
        yield service
        service.shutdown()
        thread.join()


@contextmanager
def kept_inputs(site: Site) -> Iterator[None]:
    """Keep what is sent with every order, as an account can choose."""
    database = Database(site.database_url)

    def keep(wanted: bool) -> None:
        with database.transaction() as connection:
            change_account(connection, site.seeded.accounts["atlas"].id, keep_inputs=wanted)

    keep(True)
    yield
    keep(False)
    database.dispose()
