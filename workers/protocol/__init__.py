"""Interfaces between agent and engine process: engine protocol, host protocol, messages."""
