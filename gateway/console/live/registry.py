"""All topics that pages can follow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gateway.console.live import installation, open_request, overview, tail
from gateway.console.live.topics import Topic

TOPICS: Final[Mapping[str, Topic]] = {
    topic.name: topic
    for topic in (*installation.TOPICS, *overview.TOPICS, *tail.TOPICS, *open_request.TOPICS)
}
