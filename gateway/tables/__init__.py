"""The SQL tables, one module for each part of the product.

They share one metadata. Importing any module imports all of them, so that it is complete.
"""

from gateway.tables import archives as archives
from gateway.tables import audit as audit
from gateway.tables import batches as batches
from gateway.tables import feedback as feedback
from gateway.tables import files as files
from gateway.tables import invoices as invoices
from gateway.tables import notices as notices
from gateway.tables import organisations as organisations
from gateway.tables import payments as payments
from gateway.tables import prices as prices
from gateway.tables import proofs as proofs
from gateway.tables import retention as retention
from gateway.tables import set_aside as set_aside
from gateway.tables import settlement_time as settlement_time
from gateway.tables import usage as usage
from gateway.tables import users as users
from gateway.tables import voices as voices
from gateway.tables import webhooks as webhooks
from gateway.tables import workflows as workflows
