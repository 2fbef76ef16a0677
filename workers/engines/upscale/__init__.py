"""Engine of ``image-upscale`` and ``video-upscale``: pictures and frames, tile by tile."""
