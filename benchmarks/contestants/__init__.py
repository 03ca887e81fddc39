"""The contestants of publish_cost and claim: each module is one library, or a floor, in a process of its own."""
