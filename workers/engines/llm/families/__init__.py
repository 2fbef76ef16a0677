"""What single families of language models need beside the library's modules."""
