"""Who is measured by publish_cost and claim: each module one library, or a floor, in a process of its own."""
