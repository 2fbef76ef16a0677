"""The operators' actions, each defined once for HTTP and for the command line.

A module per noun. Each action has a frozen body, a function that runs it in the caller's
transaction and returns its view, and errors that ``refusals`` gives a code. ``gateway.api.admin``
and ``gateway.commands`` adapt them: they know paths, options, pages and tables, and decide nothing.
"""
