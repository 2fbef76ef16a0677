"""The workers run models. They have no access to API keys, SQL or prices."""
