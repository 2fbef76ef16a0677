"""Accounts, their keys, and the budgets and limits of both."""
