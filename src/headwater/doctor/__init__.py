"""`headwater doctor`: looks at the machine, measures it, and says what is wrong and what to do.

Each check is a function from facts to findings: tests give it invented facts. headwater.doctor.run
collects the facts of the machine and calls them all.
"""
