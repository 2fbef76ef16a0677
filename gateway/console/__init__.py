"""The console: pages for operators, finance and the people of accounts, served under ``/console``.

It calls the services that the API and the commands call, has no SQL, and is imported by ``app``
alone. Who may enter is in ``entrance``, what a role may do in ``roles``.
"""
