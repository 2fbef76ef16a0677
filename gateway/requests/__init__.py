"""The life of a request: admitted, held for, queued, waited for, settled; and its ways to end."""
