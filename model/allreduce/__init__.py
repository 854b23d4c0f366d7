"""All-reduce time: hops, analytic form, discrete-event form, calibration."""
