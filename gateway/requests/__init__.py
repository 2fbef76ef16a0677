"""The life of a request: admitted, held for, queued, waited for, settled; and all its ways to end."""
