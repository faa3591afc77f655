"""torchvision: a folder of photographs with one folder per class, and the usual augmentation of ImageNet."""

from torchvision import datasets, transforms

OPTIONS = {"batch_size": 16}


def make(root):
    return datasets.ImageFolder(
        f"{root}/photos",
        transforms.Compose(
            [
                transforms.RandomResizedCrop(160),
                transforms.RandomHorizontalFlip(),
                transforms.ColorJitter(0.2, 0.2, 0.2),
                transforms.ToTensor(),
                transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
            ]
        ),
    )
