"""The operator: brokers as Kubernetes resources. `broker.py` decides, `reconciliation.py` observes and acts."""
