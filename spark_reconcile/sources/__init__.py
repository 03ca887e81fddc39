"""Where the evidence is read: databases by DB-API, broker logs in place. Nothing is judged here."""
