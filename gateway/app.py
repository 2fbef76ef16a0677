"""Creates the application: the only place where the parts of the gateway are connected."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import signal
import uuid
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from typing import Literal, TypeAlias

from litestar import Litestar, Router
from litestar.config.cors import CORSConfig
from litestar.datastructures import State
from litestar.exceptions import HTTPException
from litestar.openapi.spec import Components, SecurityScheme, Tag

from gateway.accounts.attempts import Attempts
from gateway.accounts.key_uses import KeyUses
from gateway.accounts.pepper import read_pepper
from gateway.accounts.rates import Rates
from gateway.accounts.refused_attempts import RefusedAttempts
from gateway.accounts.visitors import Visitors
from gateway.api import admin, elevenlabs, gmi, native, openai, openrouter
from gateway.api.front import FrontPageController
from gateway.api.health import HealthController
from gateway.api.http.access import Access
from gateway.api.http.bodies import EXCEPTION_HANDLERS
from gateway.api.http.guards import check_address, require_key
from gateway.api.http.headers import READABLE_HEADERS, add_limit_headers, allowed_methods
from gateway.api.http.large_bodies import Bodies
from gateway.api.http.request import ApiRequest, Services
from gateway.api.native import batches as native_batches
from gateway.api.native.catalog import CatalogController
from gateway.api.native.views import request_view
from gateway.api.openai.batches import ENDPOINTS
from gateway.api.openai.chat import ChatController
from gateway.api.openai.embeddings import EmbeddingsController
from gateway.api.openapi.document import DocumentConfig
from gateway.api.openapi.page import DocumentationPlugin
from gateway.audit_log import Author
from gateway.batches.runner import Runner
from gateway.batches.stored import StoredOutputs
from gateway.billing.usage.today import TodayUsage
from gateway.billing.usage.traffic import TrafficHour
from gateway.catalog.store import LiveCatalog
from gateway.console.app import console_router, prepare_pages, refuse_route
from gateway.console.headers import add_console_headers
from gateway.console.jobs.runner import ConsoleJobs
from gateway.console.live.stream import session_checks
from gateway.console.live.updates import LiveUpdates
from gateway.disk import written_paths
from gateway.files.download_urls import UrlSigner
from gateway.files.fetch import Fetcher
from gateway.files.retention import MediaStore
from gateway.files.room import Room, StorageLimits
from gateway.files.store import Files
from gateway.files.upload_urls import UploadUrls
from gateway.notices.mail import mailer_of
from gateway.notices.sender import NoticeSender
from gateway.operations.running.gateways import Gateways, Reporter
from gateway.operations.running.server import QueueServer
from gateway.payments.provider import PaymentProvider
from gateway.performance import Performance
from gateway.readiness import Readiness
from gateway.requests.service import Requests
from gateway.retention.clearing import Retention
from gateway.retention.erasure import Eraser
from gateway.retention.kinds import all_kinds
from gateway.scheduled import (
    Scheduler,
    aside_tasks,
    close_tasks,
    credit_tasks,
    erasure_tasks,
    notice_tasks,
    partition_tasks,
    price_tasks,
    reconciliation_tasks,
    recount_tasks,
    upstream_tasks,
    usage_tasks,
)
from gateway.settings import Settings
from gateway.sql.database import Database
from gateway.sql.outages import SQL_OUTAGE, outage_name
from gateway.supervision import Supervisor, exit_now
from gateway.voices.store import Voices
from gateway.webhooks.sender import Poster
from workers.contract.blobs import Blobs
from workers.contract.redis import connect
from workers.contract.streams import EventLog

log = logging.getLogger(__name__)

VERSION = "0.1.0"
FORM_BYTES = 64 * 1024
"""Maximum size of a multipart form in addition to its file."""


Part: TypeAlias = Literal["all", "gateway", "console"]
"""What a process does of what a gateway does: all that its processes do; all, but others may share
its work; what the console needs, without scheduled work and settling."""


def create_app(settings: Settings, *, part: Part = "all") -> Litestar:
    """Create the gateway. Nothing is opened before the application starts."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Litestar) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            database = Database(settings.sql_url, prepare=settings.database_prepare)
            stack.push_async_callback(database.close)
            redis = connect(settings.queue_url)
            stack.push_async_callback(redis.aclose)
            live = await LiveCatalog.open(
                settings.catalog,
                database,
                hour_nanos=settings.gpu_hour_nanos,
                shared=part != "all",
            )
            pepper = read_pepper(settings)
            rates = Rates(redis, namespace=settings.namespace)
            blobs = Blobs(settings.blobs, bytes_max=2**40)
            room = Room(
                database,
                StorageLimits(settings.account_files_max, settings.account_file_bytes_max),
                paths=written_paths(settings),
                disk_reserve=settings.disk_reserve_bytes,
            )
            files = Files(database, blobs, room)
            media = MediaStore(
                database, blobs, retention=timedelta(hours=settings.output_retention_hours)
            )
            fetcher = Fetcher(
                blobs,
                files,
                bytes_max=settings.media_bytes_max,
                timeout_s=settings.fetch_timeout_s,
                private_allowed=settings.fetch_private_addresses,
                room=room,
            )
            stack.push_async_callback(fetcher.close)
            spool_directory = settings.home / "spool"
            spool_directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            bodies = Bodies(
                database,
                room,
                directory=spool_directory,
                bytes_max=settings.bodies_bytes_max,
                account_bytes_max=settings.account_bodies_bytes_max,
                memory_max=settings.bodies_memory_bytes_max,
                kept_max=settings.body_bytes_max,
            )
            stack.callback(bodies.close)
            voices = Voices(
                database,
                blobs,
                fetcher,
                count_max=settings.account_voices_max,
                bytes_max=settings.voice_bytes_max,
            )
            links = UrlSigner.make(
                pepper,
                valid_s=settings.media_url_minutes * 60,
                base=settings.public_url or f"http://{settings.host}:{settings.port}",
            )
            uses, refused = KeyUses(database), RefusedAttempts(database)
            supervisor = Supervisor(
                failures_max=settings.loop_failures_max,
                silence_max_s=settings.loop_silence_max_s,
                grace_s=settings.shutdown_grace_s,
            )
            poster = Poster(pepper=pepper, private_allowed=settings.webhook_private_addresses)
            notices = NoticeSender(
                database, poster=poster, mailer=mailer_of(settings), pepper=pepper
            )
            name = f"{'console' if part == 'console' else 'gw'}-{uuid.uuid4().hex[:12]}"
            requests = Requests(
                settings=settings,
                database=database,
                redis=redis,
                live=live,
                rates=rates,
                gateway=name,
                poster=poster,
                media=media,
                fetcher=fetcher,
                voices=voices,
                view=functools.partial(request_view, links=links),
            )
            batches = Runner(
                database=database,
                files=files,
                requests=requests,
                endpoints={**ENDPOINTS, native_batches.BATCHES.path: native_batches.BATCHES},
                stored=StoredOutputs(blobs, links, file_bytes_max=settings.file_bytes_max),
                settings=settings,
            )
            services = Services(
                settings=settings,
                database=database,
                live=live,
                requests=requests,
                supervisor=supervisor,
                readiness=Readiness(database, requests.health, settings),
                blobs=blobs,
                files=files,
                room=room,
                bodies=bodies,
                media=media,
                links=links,
                upload_urls=UploadUrls.make(pepper),
                voices=voices,
                batches=batches,
                rates=rates,
                performance=Performance(database),
                pepper=pepper,
                payment_provider=payment_provider(settings),
                eraser=Eraser(database, blobs, EventLog(redis, namespace=settings.namespace)),
                access=Access(database, pepper=pepper, uses=uses),
                refused=refused,
                visitors=Visitors(settings.public_catalog_per_minute),
                attempts=Attempts(redis, namespace=settings.namespace),
                traffic=TrafficHour(database),
                today=TodayUsage(),
                queue_server=QueueServer(redis, settings.namespace),
                gateways=Gateways(redis, namespace=settings.namespace),
            )
            app.state.services = services
            app.state.console_jobs = jobs = ConsoleJobs(database)
            app.state.live_updates = LiveUpdates()
            app.state.session_checks = session_checks()
            stack.callback(app.state.live_updates.close)
            chores = Scheduler(
                database,
                [
                    *credit_tasks(database),
                    *usage_tasks(database),
                    *erasure_tasks(database),
                    *aside_tasks(database),
                    *notice_tasks(database, credit_low_nanos=settings.notice_credit_low_nanos),
                    *recount_tasks(database),
                    *upstream_tasks(database, live, os.environ),
                    *partition_tasks(database),
                    *price_tasks(database),
                    *reconciliation_tasks(database, services.payment_provider),
                    *(close_tasks(database) if settings.close_months else ()),
                ],
            )
            retention = Retention(database, all_kinds(settings, database, blobs))
            await stack.enter_async_context(supervisor.running())
            await stack.enter_async_context(requests.running(supervisor, settles=part != "console"))
            await stack.enter_async_context(jobs.running())
            if part != "console":
                supervisor.start("chores", chores.run)
                supervisor.start("retention", retention.run)
                supervisor.start("batches", batches.run)
                supervisor.start("notices", notices.run)
            supervisor.start("key uses", uses.run)
            supervisor.start("refused attempts", refused.run)
            reporter = Reporter(
                services.gateways,
                name,
                database=database,
                requests=requests,
                supervisor=supervisor,
                batches=lambda: batches.running,
                tasks=lambda: chores.runs,
                part="console" if part == "console" else "gateway",
            )
            supervisor.start("gateway row", reporter.run)
            if part == "console":
                stack.callback(asyncio.create_task(prepare_pages(app)).cancel)
            with reload_on_hangup(live):
                yield
        if supervisor.failed:
            exit_now()

    document = DocumentConfig(
        title="Tollgate",
        version=VERSION,
        description=(
            "Each request is quoted, held, executed, itemised and charged. Amounts are decimal "
            "strings of USD. Errors have OpenAI's body, or that of the dialect which was called."
        ),
        path="/schema",
        components=Components(
            security_schemes={
                "key": SecurityScheme(type="http", scheme="bearer"),
                "header": SecurityScheme(
                    type="apiKey", name="xi-api-key", security_scheme_in="header"
                ),
            }
        ),
        security=[{"key": []}],
        tags=[
            Tag("OpenAI", "The API of OpenAI, for its unmodified clients."),
            Tag("OpenRouter", "OpenRouter's endpoints for credit and generation costs."),
            Tag("ElevenLabs", "ElevenLabs' endpoints for speech, music and voices."),
            Tag("GMI Cloud", "GMI Cloud's request queue."),
            Tag("Requests", "Every task of every model, asynchronously."),
            Tag("Catalog", "Models, prices, availability."),
            Tag("Account", "Balance, usage, keys."),
            Tag("Operation", "Health, metrics, administration."),
        ],
        render_plugins=[DocumentationPlugin()],
    )
    app = Litestar(
        route_handlers=[
            *(admin.HANDLERS + native.HANDLERS + openai.HANDLERS + openrouter.HANDLERS),
            # OpenRouter's clients have one base URL, /api/v1.
            Router(
                "/api",
                route_handlers=[
                    *openrouter.HANDLERS,
                    CatalogController,
                    EmbeddingsController,
                ],
                include_in_schema=False,
            ),
            Router(
                "/api",
                route_handlers=[ChatController],
                request_max_body_size=settings.media_body_bytes_max,
                include_in_schema=False,
            ),
            Router(
                "",
                route_handlers=[*openai.FILE_HANDLERS],
                request_max_body_size=settings.file_bytes_max + FORM_BYTES,
            ),
            Router(
                "",
                route_handlers=[
                    *elevenlabs.MEDIA_HANDLERS,
                    *gmi.MEDIA_HANDLERS,
                    *native.MEDIA_HANDLERS,
                    *openai.MEDIA_HANDLERS,
                ],
                request_max_body_size=settings.media_body_bytes_max,
            ),
            FrontPageController,
            HealthController,
            *([console_router(settings)] if settings.console else ()),
        ],
        guards=[require_key, check_address],
        request_class=ApiRequest,
        before_send=[add_limit_headers, add_console_headers],
        cors_config=cors_of(settings),
        lifespan=[lifespan],
        exception_handlers=(
            {**EXCEPTION_HANDLERS, HTTPException: refuse_route}
            if settings.console
            else EXCEPTION_HANDLERS
        ),
        request_max_body_size=settings.body_bytes_max,
        state=State({}),
        logging_config=None,
        openapi_config=document,
    )
    document.routes = app.routes
    app.state.methods = allowed_methods(app.routes)
    return app


def cors_of(settings: Settings) -> CORSConfig | None:
    """Allow pages of the configured origins to call the gateway; None without the setting.

    Cookies are never allowed: a page sends an API key, as every other client does.
    """
    if not settings.allowed_origins:
        return None
    return CORSConfig(
        allow_origins=list(settings.allowed_origins),
        expose_headers=list(READABLE_HEADERS),
        max_age=3600,
    )


def payment_provider(settings: Settings) -> PaymentProvider | None:
    """Create the configured payment provider; None if there is none."""
    if settings.stripe_api_key is None or settings.stripe_webhook_secret is None:
        return None
    # Stripe's library is slow to import, and most installations do not use it.
    from gateway.payments.stripe import StripeProvider

    return StripeProvider(
        settings.stripe_api_key.get_secret_value(),
        settings.stripe_webhook_secret.get_secret_value(),
        base=settings.stripe_api_base,
    )


def create_app_from_environment() -> Litestar:
    """Create the gateway for ASGI servers started from the command line, such as granian."""
    return create_app(Settings())


@contextlib.contextmanager
def reload_on_hangup(live: LiveCatalog) -> Iterator[None]:
    """Reload the catalog on SIGHUP, if the platform and the thread allow a signal handler."""
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()

    async def reload() -> None:
        try:
            problems = await live.reload(Author("SIGHUP", "system"))
        except SQL_OUTAGE as error:
            log.error("catalog not reloaded: the database failed: %s", outage_name(error))
            return
        for problem in problems:
            log.error("catalog not reloaded: %s", problem)
        if not problems:
            log.info("catalog reloaded")

    def on_hangup() -> None:
        task = loop.create_task(reload())
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    installed = False
    with contextlib.suppress(NotImplementedError, ValueError, RuntimeError, AttributeError):
        loop.add_signal_handler(signal.SIGHUP, on_hangup)
        installed = True
    try:
        yield
    finally:
        if installed:
            loop.remove_signal_handler(signal.SIGHUP)
