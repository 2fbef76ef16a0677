from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.artist import Artist, at_work
from tests.databases import Databases
from tests.stack import Stack, running
from tests.workers.llm.checkpoints import TOOLS_TEMPLATE, make_checkpoint
from tests.workers.reranking.checkpoints import make_checkpoint as make_ranker
from tests.workers.speech.checkpoints import make_checkpoint as make_talker
from tests.workers.transcription.checkpoints import make_checkpoint as make_scribe


@pytest.fixture(scope="session")
def shared_stack(
    tmp_path_factory: pytest.TempPathFactory, postgres: str, valkey: str
) -> Iterator[Stack]:
    """One gateway and one worker for the tests of a process; every test has its own account."""
    directory = tmp_path_factory.mktemp("stack")
    url = Databases("sqlite", directory, postgres).make()
    with running(directory / "home", url, valkey, namespace=f"t{uuid.uuid4().hex[:8]}") as made:
        yield made


MUSIC = Path(__file__).parents[2] / "workers" / "pocket" / "music"
VOICES = MUSIC.with_name("speech")
TINY = """\
  - name: tiny
    task: text-generation
    engine: llm
    checkpoint: {checkpoint}
    options: {{slots: 8, threads: 1}}
    limits: {{context_tokens: 4096, output_tokens: 512, choices: 4}}
    price: *price
  - name: tiny-rank
    task: rerank
    engine: rerank
    checkpoint: {ranker}
    limits: {{context_tokens: 64, inputs: 10}}
    price: [{{unit: input_token, amount: "0.01", per: 1000000}}]
  - name: tiny-embed
    task: text-embedding
    engine: embedding
    checkpoint: {checkpoint}
    options: {{matryoshka: true}}
    limits: {{context_tokens: 64, inputs: 100, dimensions: 48}}
    price: [{{unit: input_token, amount: "0.01", per: 1000000}}]
"""


@pytest.fixture(scope="session")
def shared_text_stack(
    tmp_path_factory: pytest.TempPathFactory, postgres: str, valkey: str
) -> Iterator[Stack]:
    """With a language model of random weights, whose template knows tools."""
    directory = tmp_path_factory.mktemp("text")
    checkpoint = make_checkpoint("qwen3", directory / "tiny", template=TOOLS_TEMPLATE)
    url = Databases("sqlite", directory, postgres).make()
    with running(
        directory / "home",
        url,
        valkey,
        namespace=f"t{uuid.uuid4().hex[:8]}",
        more_models=TINY.format(checkpoint=checkpoint, ranker=make_ranker(directory / "ranker")),
    ) as made:
        yield made


@pytest.fixture
def text_stack(shared_text_stack: Stack) -> Iterator[Stack]:
    yield shared_text_stack
    shared_text_stack.close_clients()


@pytest.fixture
def stack(shared_stack: Stack) -> Iterator[Stack]:
    yield shared_stack
    shared_stack.close_clients()


MEDIA = """\
  - name: pocket
    aliases: [dall-e-3, acme/old]
    task: text-to-image
    also: [image-to-image, image-edit, image-blend]
    engine: echo
    sizes: ["64x64", "128x64"]
    qualities: {low: {steps: 2}, high: {steps: 8}}
    schedulers: [euler, ddim]
    slo: {total_ms: 60000}
    default_parameters: {quality: low, guidance: 4}
    limits: {images: 4, sources: 3, steps: 10, scale: 2, guidance: 9, timeout_s: 20}
    price:
      - {unit: image, amount: "0.01"}
      - {unit: image, amount: "0.03", when: {quality: high}}
  - name: film
    aliases: [sora-2]
    task: text-to-video
    also: [image-to-video]
    engine: echo
    sizes: ["64x64", "128x72"]
    limits: {seconds: 8, fps: 24, steps: 10, timeout_s: 20}
    default_parameters: {seconds: 2}
    price: [{unit: video_second, amount: "0.1"}]
  - name: tune
    task: text-to-music
    engine: echo
    limits: {seconds: 60, timeout_s: 20}
    default_parameters: {seconds: 2}
    price: [{unit: audio_second, amount: "0.1"}]
  - name: reader
    task: text-to-speech
    engine: echo
    price: [{unit: character, amount: "0.001"}]
  - name: mimic
    task: text-to-speech
    also: [voice-clone]
    engine: echo
    voices: [ann, bob]
    limits: {characters: 100, seconds: 60, timeout_s: 20}
    price: [{unit: character, amount: "0.001"}]
"""


@pytest.fixture(scope="session")
def shared_media_stack(
    tmp_path_factory: pytest.TempPathFactory, postgres: str, valkey: str
) -> Iterator[tuple[Stack, Artist]]:
    """A gateway whose only worker generates images without a model."""
    directory = tmp_path_factory.mktemp("media") / "home"
    directory.mkdir()
    url = Databases("sqlite", directory, postgres).make()
    catalog = directory / "catalog.yaml"
    catalog.write_text("version: 1\nmodels:\n" + MEDIA)
    made = Stack(directory, url, valkey, f"t{uuid.uuid4().hex[:8]}", catalog)
    blob_url = made.environment()["BLOB_URL"]
    with at_work(["pocket", "film", "tune", "mimic"], valkey, made.namespace, blob_url) as artist:
        try:
            made.start_gateway(
                environment={
                    "TOLLGATE_FETCH_PRIVATE_ADDRESSES": "true",
                    "TOLLGATE_FETCH_TIMEOUT_S": "5",
                    "TOLLGATE_MEDIA_BYTES_MAX": "1000000",
                    "TOLLGATE_VOICE_BYTES_MAX": "100000",
                    "TOLLGATE_ACCOUNT_VOICES_MAX": "5",
                    "TOLLGATE_PUBLIC_CATALOG": "true",
                }
            )
            made.wait_for_model("pocket")
            made.wait_for_model("film")
            made.wait_for_model("tune")
            made.wait_for_model("mimic")
            yield made, artist
        finally:
            made.stop()


@pytest.fixture
def media_stack(shared_media_stack: tuple[Stack, Artist]) -> Iterator[Stack]:
    yield shared_media_stack[0]
    shared_media_stack[0].close_clients()


@pytest.fixture
def artist(shared_media_stack: tuple[Stack, Artist]) -> Artist:
    return shared_media_stack[1]


SPEECH = """\
  - name: tiny-speech
    task: text-to-speech
    engine: speech
    checkpoint: {checkpoint}
    options: &options
      threads: 1
      languages: [en]
      voices: {{ann: {{speaker: 1}}, bob: {{speaker: 2}}}}
    limits: {{characters: 2000}}
    price: [{{unit: character, amount: "0.001"}}]
  - name: timed-speech
    task: text-to-speech
    engine: speech
    checkpoint: {checkpoint}
    options: *options
    limits: {{seconds: 60}}
    price: [{{unit: audio_second, amount: "0.1"}}]
  - name: brief-speech
    task: text-to-speech
    engine: speech
    checkpoint: {checkpoint}
    options: *options
    limits: {{seconds: 1}}
    price: [{{unit: audio_second, amount: "0.1"}}]
  - name: band
    task: text-to-music
    engine: music
    checkpoint: {music}
    options: {{threads: 1}}
    limits: {{seconds: 30}}
    price: [{{unit: audio_second, amount: "0.1"}}]
  - name: tiny-clone
    task: text-to-speech
    also: [voice-clone]
    engine: speech
    checkpoint: {cloning}
    options: {{threads: 1, sentence_seconds: 0.5}}
    price: [{{unit: character, amount: "0.001"}}]
  - name: scribe
    aliases: [whisper-1]
    task: speech-to-text
    engine: transcription
    checkpoint: {scribe}
    options: {{threads: 1}}
    limits: {{seconds: 20}}
    price: [{{unit: audio_second, amount: "0.0001"}}]
  - name: reader
    task: text-to-speech
    also: [voice-clone]
    engine: speech
    checkpoint: {voices}
    options:
      threads: 1
      voices:
        ivo: {{embedding: voices/ivo.safetensors}}
        lena: {{embedding: voices/lena.safetensors}}
    price: [{{unit: character, amount: "0.001"}}]
"""


@pytest.fixture(scope="session")
def shared_speech_stack(
    tmp_path_factory: pytest.TempPathFactory, postgres: str, valkey: str
) -> Iterator[Stack]:
    """With models of random weights that speak in two voices or in that of a recording, and those
    of speech and music that are shipped."""
    directory = tmp_path_factory.mktemp("speech")
    checkpoint = make_talker("vits-speakers", directory / "tiny")
    cloning = make_talker("dia", directory / "cloning")
    scribe = make_scribe(directory / "scribe", seed=7)
    with running(
        directory / "home",
        Databases("sqlite", directory, postgres).make(),
        valkey,
        namespace=f"t{uuid.uuid4().hex[:8]}",
        more_models=SPEECH.format(
            checkpoint=checkpoint, cloning=cloning, music=MUSIC, scribe=scribe, voices=VOICES
        ),
    ) as made:
        yield made


@pytest.fixture
def speech_stack(shared_speech_stack: Stack) -> Iterator[Stack]:
    yield shared_speech_stack
    shared_speech_stack.close_clients()
