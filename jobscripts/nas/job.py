"""What MalleTrain and torchrun start: the training of one cell.

malletrain submit --nodes 1:4 jobscripts/nas/job.py --edges 1056769 --ops 0 --data fashion_mnist
"""

from nas.train import main

if __name__ == "__main__":
    main()
