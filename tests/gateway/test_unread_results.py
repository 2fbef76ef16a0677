"""Results of upstreams that could not be read: kept for the operator, not charged."""

from __future__ import annotations

from tests.gateway.test_media import finished
from tests.stack import Stack


def test_result_that_cannot_be_read_is_kept_for_the_operator(media_stack: Stack) -> None:
    caller = media_stack.caller()
    admin = media_stack.caller(scopes=("admin", "read"))

    answer = finished(caller, prompt="!unread")

    assert (answer["status"], answer["cost"]) == ("failed", "0")
    place = f"/v1/admin/set-aside/result/{answer['id']}"
    kept = admin.http.get(place).json()
    assert kept["reason"] == "pocket: it contains no image"
    assert kept["content"] == {
        "number": "r-7",
        "model": "their-name",
        "endpoint": "host",
        "result": {"a": [1]},
    }
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
