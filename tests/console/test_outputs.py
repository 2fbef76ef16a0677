"""What a page shows of an output."""

from __future__ import annotations

from gateway.console.views.outputs import ShownMedium, with_stills


def medium(position: int, kind: str, role: str = "output", *, stored: bool = True) -> ShownMedium:
    return ShownMedium(position, kind, role, stored, "", None, None)


def stills(shown: list[ShownMedium]) -> list[tuple[int, int | None, list[int]]]:
    """Return for each medium its position, its poster and its further pictures."""
    return [(one.position, one.poster, [each.position for each in one.stills]) for one in shown]


def test_pictures_of_a_video_are_its_poster_and_links() -> None:
    media = [medium(0, "video"), medium(1, "image", "thumbnail"), medium(2, "image", "spritesheet")]

    (video,) = with_stills(media)

    assert (video.poster, [each.label for each in video.stills]) == (
        1, ["first picture", "sheet of frames"],
    )  # fmt: skip


def test_each_of_two_videos_has_its_own_picture() -> None:
    two = [medium(0, "video"), medium(1, "video")]

    each = with_stills([*two, medium(2, "image", "thumbnail"), medium(3, "image", "thumbnail")])
    shared = with_stills([*two, medium(2, "image", "thumbnail")])

    assert stills(each) == [(0, 2, [2]), (1, 3, [3])]
    assert stills(shared) == [(0, 2, [2]), (1, 2, [2])]


def test_pictures_without_their_video_are_shown() -> None:
    deleted = [medium(0, "video", stored=False), medium(1, "image", "thumbnail")]

    assert stills(with_stills(deleted)) == [(0, None, []), (1, None, [])]
    gone = [medium(0, "video"), medium(1, "image", "thumbnail", stored=False)]
    assert stills(with_stills(gone)) == [(0, None, [])]
