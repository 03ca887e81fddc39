"""One module a broker: how a Python program that wants its speed talks to it. Not what is measured with it."""
