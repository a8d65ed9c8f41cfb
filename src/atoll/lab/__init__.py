"""The lab: real training of many learners on one device in virtual time, driven by the machines of production."""
