"""What Atoll is tried, measured and planned with. The product (every other room) imports none of it.

sim        the seeded simulator: the real machines in virtual time, with faults
check      one checker per invariant, fed by the simulator and by storms on real processes
chaos      faults: drawn, planned, done to processes and links;  storms: runs under them, and their scorecards
fleet      goodput of very large runs, in virtual time
lab        learning itself: many small runs in one process, and their studies
plan       what a run will need and how it will go;  replay: a recorded run again, to the bit
figures    pictures of all of it;  cli: the commands
"""
