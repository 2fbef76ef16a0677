"""The OpenAPI document, made from the types that handlers take and return, and its page."""
