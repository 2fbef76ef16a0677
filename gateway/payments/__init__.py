"""Payments: money that accounts pay in through a provider."""
