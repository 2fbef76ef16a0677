"""Generate a video from a text."""

from tollgate import run, save

film = run("pocket-video", prompt="a red star moves left above a blue square", seconds=2)
save(film, "video.mp4")
