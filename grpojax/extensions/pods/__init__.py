"""Several processes of one run, each with some of the devices: how they find each other, and how they end together."""

from grpojax.extension import Names

NAMES = Names(processes="grpojax.extensions.pods.pod")
