"""Notices: what accounts and the operator are told, by webhook and by mail."""
