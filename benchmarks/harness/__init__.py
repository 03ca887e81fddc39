"""What the benchmark programs share: servers, rounds, figures, what they print. Not what is measured."""
