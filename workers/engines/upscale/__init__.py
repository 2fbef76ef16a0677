"""Engine of ``image-upscale`` and ``video-upscale``: images and frames, tile by tile."""
