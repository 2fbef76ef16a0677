"""The OpenAPI document, generated from the types of handlers, and its page."""
