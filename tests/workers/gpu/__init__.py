"""What a run on a GPU has to show: its test here, and the test that walks the same on a CPU.

- torch's attention reads blocks in place, with its own kernels, heads of 256, windows, and with the
  past in one part or in several: ``test_attention``; ``llm/test_cache``
- steps are recorded, with the writes into the cache, and a failed recording leaves the device
  usable; scaled and long rotary factors are recorded: ``test_text``; ``llm/test_devices``
- tables as wide as the longest sequence with its draft tokens: ``test_text``; ``llm/test_devices``
- gathered caches in float32, and latents: ``test_text``; ``llm/test_cache``, ``llm/test_latents``
- nothing waits between the launch of a step and the tokens before it: ``test_text``;
  ``llm/test_running_ahead``
- sampling gives the tokens of a CPU: ``test_text``; ``llm/test_sampling``
- products of int8, fp8 and int4 of any size are right, and quantising needs little room:
  ``test_devices``, ``test_text``; ``test_quantising``, ``test_stored_layers``
- pipelines in 16 bits, and SDXL whose runs do not cast each other's autoencoder: ``test_pictures``;
  ``diffusion/test_pipelines``
- sixteen pictures of a megapixel are decoded or split; parts wait in pinned memory:
  ``test_pictures``; ``diffusion/test_tiling``, ``diffusion/test_parking``
- the vision tower, in slices: ``test_text``; ``llm/test_pictures``
- progress, placement, TF32, loading and leaving of all shipped models: ``test_devices``;
  ``test_devices``, ``test_interrupting``
"""
