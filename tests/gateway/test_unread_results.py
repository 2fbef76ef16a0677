"""Results of upstreams that could not be read: kept for the operator, not charged."""

from __future__ import annotations

from gateway.audit_log import Author
from gateway.operations.entrance.content_grants import GrantBody, grant
from gateway.sql.database import Database
from tests.gateway.test_media import finished
from tests.stack import Stack


def with_grant(stack: Stack, account_id: int) -> None:
    """Give operators sight of an account, as an owner does."""
    database = Database(stack.database_url)
    try:
        with database.transaction() as connection:
            grant(
                connection, Author("owner", "http"), account_id, GrantBody(hours=1, reason="look")
            )
    finally:
        database.dispose()


def test_result_that_cannot_be_read_is_kept_for_the_operator(media_stack: Stack) -> None:
    caller = media_stack.caller()
    admin = media_stack.caller(scopes=("admin", "read"))

    answer = finished(caller, prompt="!unread")

    assert (answer["status"], answer["cost"]) == ("failed", "0")
    place = f"/v1/admin/set-aside/result/{answer['id']}"
    kept = admin.http.get(place).json()
    assert kept["reason"] == "pocket: it contains no image"
    assert (kept["content"], kept["content_hidden"]) == (None, True)
    with_grant(media_stack, caller.account_id)
    kept = admin.http.get(place).json()
    assert kept["content_hidden"] is False
    assert kept["content"] == {
        "number": "r-7",
        "model": "their-name",
        "endpoint": "host",
        "result": {"a": [1]},
    }
    auditor = media_stack.caller(scopes=("admin", "read"), role="auditor")
    assert auditor.http.get(place).json()["content"] is None
    listed = admin.http.get("/v1/admin/set-aside").json()["data"]
    (row,) = [one for one in listed if one["name"] == answer["id"]]
    assert (row["kind"], "content" in row) == ("result", False)
    assert caller.http.get(place).status_code == 403
    assert (
        'tollgate_upstream_results_unread_total{model="pocket"} 1.0'
        in caller.http.get("/metrics").text
    )

    assert admin.http.post(f"{place}/release").status_code == 200
    assert admin.http.get(place).status_code == 404
