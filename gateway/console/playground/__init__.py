"""The playground: a form for every task, its quote, its result, and the same call as code."""
